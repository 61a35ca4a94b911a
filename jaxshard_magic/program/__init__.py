"""A traced step as data: jaxpr, equations, dimensions, roles of inputs, and the tools to re-emit a changed step."""
