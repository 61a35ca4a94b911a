"""Conversion of SVG documents to PNG."""

from jaxshard_magic.errors import ShardError

SCALE = 2  # pixels of the file for each px of the drawing


def png(text: str) -> bytes:
    """Return an SVG document as a PNG file, with 2 pixels for each px.

    Raises:
        ShardError: The package resvg-py is not installed.
    """
    try:
        import resvg_py
    except ImportError:
        line = "pip install resvg-py"
        raise ShardError(
            f"a .png takes the package resvg-py, which is not installed: {line}; a .svg needs nothing", fix=line
        ) from None
    return bytes(resvg_py.svg_to_bytes(svg_string=text, zoom=SCALE))
