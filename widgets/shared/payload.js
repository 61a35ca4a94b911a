// What the kernel sends: JSON, deflated. 2,000 leaves on 512 devices take some tens of kB.

/**
 * The payload in `packed`, a DataView or typed array of zlib data.
 *
 * @param {BlobPart} packed
 */
export const unpacked = async (packed) => JSON.parse(await inflated(packed));

/**
 * The text in `packed`.
 *
 * @param {BlobPart} packed
 */
export async function inflated(packed) {
  if (typeof DecompressionStream === "undefined") {
    throw new Error("this browser is too old to unpack it (no DecompressionStream)");
  }
  const bytes = new Blob([packed]);
  const stream = bytes.stream().pipeThrough(new DecompressionStream("deflate"));
  return new Response(stream).text();
}
