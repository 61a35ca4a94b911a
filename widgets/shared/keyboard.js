// Keys inside a widget are the widget's.

/** Attributes of an element that takes arrow keys: without them JupyterLab moves to another cell. */
export const OWN_KEYS = { "data-lm-suppress-shortcuts": "true" };
