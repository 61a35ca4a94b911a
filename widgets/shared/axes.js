// A mesh axis is told by its hue and, for those who don't see hues, by its dash pattern.

const DASHES = [null, "5 2", "2 2", "6 2 2 2"];

/** Above four axes hues repeat. */
const slot = (axis) => axis % DASHES.length;

export const hue = (axis) => `var(--jsm-a${slot(axis)})`;
export const dash = (axis) => DASHES[slot(axis)];
export const axisClass = (axis) => `jsm-ax${slot(axis)}`;
