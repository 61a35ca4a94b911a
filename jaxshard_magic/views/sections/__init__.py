"""Sections of a report as parts of a document."""
