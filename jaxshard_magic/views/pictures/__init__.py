"""Pictures of reports, comparisons and pipelines as standalone SVG documents."""
