// A style sheet is imported as its text: build.mjs makes it so.
declare module "*.css" {
  const text: string;
  export default text;
}
