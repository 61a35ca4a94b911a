"""The colours of every view: pairs for light and dark grounds, and one set that is seen on both.

Hue is a mesh axis, a memory role or a kind of a pipeline's actions (`on-` is the ink on it); text has a contrast of at
least 4.5 on its ground, marks of 3.
"""

ROLES = ("params", "optimizer", "batch", "temporaries")

LIGHT = {
    "bg": "#fff",
    "ink": "#1c2024",
    "ink-2": "#545c65",
    "line": "rgba(20,30,40,.14)",
    "a0": "#2a69b5",
    "a1": "#aa4d0c",
    "a2": "#00594f",
    "a3": "#651a86",
    "params": "#17347f",
    "optimizer": "#5c6fd0",
    "batch": "#c26f00",
    "temporaries": "#858e98",
    "other": "#545c65",
    "F": "#1f5ea8",
    "B": "#7a5a9e",
    "I": "#cc7f00",
    "W": "#419f84",
    "on-F": "#fff",
    "on-B": "#fff",
    "on-I": "#14171a",
    "on-W": "#14171a",
    "warning": "#8f5a00",
    "error": "#b3261e",
    "ok": "#0a7562",
    "info": "#2468b4",
}
DARK = {
    "bg": "#111",
    "ink": "#e8eaed",
    "ink-2": "#b2b9c1",
    "line": "rgba(255,255,255,.17)",
    "a0": "#82b6ff",
    "a1": "#f5995a",
    "a2": "#6fe8d4",
    "a3": "#ab82c0",
    "params": "#b4ccff",
    "optimizer": "#7f8ff0",
    "batch": "#f0ae48",
    "temporaries": "#737a82",
    "other": "#b2b9c1",
    "F": "#4f95e6",
    "B": "#b79ad8",
    "I": "#f2b544",
    "W": "#a5e3cb",
    "on-F": "#14171a",
    "on-B": "#14171a",
    "on-I": "#14171a",
    "on-W": "#14171a",
    "warning": "#e8b14c",
    "error": "#ff8a80",
    "ok": "#5fd0b4",
    "info": "#82b6ff",
}
THEMES = {"light": LIGHT, "dark": DARK}

# For HTML that cannot know its ground.
BOTH = {
    "a0": "#3f83d6",
    "a1": "#c8641f",
    "a2": "#1f8a78",
    "a3": "#9b62bd",
    "params": "#4a63c8",
    "optimizer": "#8f82d6",
    "batch": "#b8740c",
    "temporaries": "#858e98",
    "F": "#3f83d6",
    "B": "#9b7cc4",
    "I": "#c9830f",
    "W": "#2f9c7c",
    "rule": "#7a828a",
    "limit": "#d9453b",
}
