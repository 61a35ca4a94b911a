"""An SVG document as PNG."""

from jaxshard_magic.errors import ShardError

SCALE = 2  # pixels of the file for a px of the picture


def png(text: str) -> bytes:
    """The SVG document `text` as a PNG file, 2 pixels for each px. Raises ShardError without the package resvg-py."""
    try:
        import resvg_py
    except ImportError:
        line = "pip install resvg-py"
        raise ShardError(
            f"a .png takes the package resvg-py, which is not installed: {line}; a .svg needs nothing",
            fix=line,
        ) from None
    return bytes(resvg_py.svg_to_bytes(svg_string=text, zoom=SCALE))
