"""Views: a `Report` and other results as text, HTML, pictures, widgets and figures, without importing jax.

The table below has the renderers of all results. `jaxshard_magic/__init__.py` registers it, so a result read from JSON
or from a pickle finds its views in any process; `display.renderer` imports a function at its first use. The kinds:

    text              for a terminal: (result, width)
    markdown          GitHub-flavoured Markdown: (result)
    html, page        HTML without script, to embed or as a document: (result)
    pictures          functions that draw an SVG, by name: (result)
    png               an SVG as PNG: (SVG)
    widget            widget in a notebook: (result)
    page_widgets      widgets on a page without a kernel: (result)
    interactive_page  a document with these widgets: (document, widgets)
    figure            plotly figure: (result, ..., theme)
    show              display in a notebook: (result)
    chrome_trace      JSON for Perfetto: (result)
    rows              leaves folded into rows: (leaves)
"""

_RENDERERS = {
    "report.exports.HasPictures": {"png": "picture_sheet:png"},
    "report.exports.Exportable": {"interactive_page": "widget_page:with_widgets"},
    "report.Report": {
        "text": "text:of_report",
        "markdown": "markdown:of_report",
        "html": "html:of_report",
        "page": "html:page_of_report",
        "pictures": "pictures:report_pictures",
        "widget": "widget:ReportView",
        "page_widgets": "widget_page:of_report",
        "figure": "figures:figure",
        "show": "show:show",
        "rows": "leaf_rows:fold",
    },
    "report.measured.Measured": {"chrome_trace": "chrome_trace:recorded_step_to_json"},
    "report.pipeline.Pipeline": {
        "text": "text:of_pipeline",
        "html": "html:of_pipeline",
        "page": "html:page_of_pipeline",
        "pictures": "pictures:pipeline_pictures",
        "page_widgets": "widget_page:of_pipeline",
        "show": "show:show_pipeline",
        "chrome_trace": "chrome_trace:pipeline_to_json",
    },
    "report.comparison.Comparison": {
        "text": "text:of_comparison",
        "markdown": "markdown:of_comparison",
        "html": "comparison.html:to_html",
        "page": "comparison.html:page",
        "pictures": "pictures:comparison_pictures",
        "widget": "comparison.widget:ComparisonView",
        "page_widgets": "widget_page:of_comparison",
        "figure": "figures:comparison",
    },
    "report.choice.Choice": {
        "text": "text:of_choice",
        "markdown": "markdown:of_choice",
        "html": "choice.html:to_html",
        "page": "choice.html:page",
        "pictures": "pictures:choice_pictures",
        "widget": "comparison.widget:ChoiceView",
        "page_widgets": "widget_page:of_choice",
    },
    "schedule.compare.ScheduleComparison": {
        "text": "schedule_comparison:to_text",
        "html": "schedule_comparison:to_html",
        "page": "schedule_comparison:page",
        "pictures": "pictures:schedules",
        "page_widgets": "widget_page:of_schedules",
    },
    "explorer.explorer.Explorer": {
        "text": "explorer:to_text",
        "html": "explorer:to_html",
        "page": "explorer:page",
        "pictures": "pictures:explorer_pictures",
        "widget": "explorer_widget:ExplorerView",
        "page_widgets": "widget_page:of_explorer",
    },
    "history.store.History": {"text": "history:to_text", "html": "history:to_html", "page": "history:page"},
    "history.calibration.Calibration": {
        "text": "calibration:to_text",
        "html": "calibration:to_html",
        "page": "calibration:page",
    },
    "doctor.findings.Doctor": {"text": "doctor:to_text", "html": "doctor:to_html"},
    "codegen.code.Code": {
        "text": "exported_code:to_text",
        "html": "exported_code:to_html",
        "page": "exported_code:page",
    },
}

# By full name of the class; a location is the full name of a module, and a name in it.
RENDERERS = {
    f"jaxshard_magic.{cls}": {kind: f"{__name__}.{location}" for kind, location in renderers.items()}
    for cls, renderers in _RENDERERS.items()
}
