// The `_esm` of every report: small, because it travels with each of them. The views' module text lives in one
// model per kernel and is evaluated once per page.

const modules = (globalThis[Symbol.for("jaxshard_magic.modules")] ??= new Map());

async function text(model) {
  const id = model.get("_module").slice("IPY_MODEL_".length);
  try {
    const shared = await model.widget_manager.get_model(id);
    return { digest: shared.get("digest"), text: shared.get("text") };
  } catch (unreachable) {
    return asked(model);
  }
}

/** A front end that gives no other model's state: the kernel sends the text in a message. */
function asked(model) {
  return new Promise((resolve) => {
    const hear = (message) => {
      if (message?.kind !== "module") return;
      model.off("msg:custom", hear);
      resolve(message);
    };
    model.on("msg:custom", hear);
    model.send({ kind: "module" });
  });
}

async function loaded(model) {
  const { digest, text: source } = await text(model);
  if (!modules.has(digest)) {
    const url = URL.createObjectURL(new Blob([source], { type: "text/javascript" }));
    modules.set(digest, import(url).finally(() => URL.revokeObjectURL(url)));
  }
  return modules.get(digest);
}

async function render(context) {
  return (await loaded(context.model)).render(context);
}

export default { render };
