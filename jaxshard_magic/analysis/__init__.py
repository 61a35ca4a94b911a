"""A compiled step turned into facts: where its arrays lie, what fills memory, what moves between devices."""
