"""The report as an HTML page: jinja2 templates and what renders them. Knows the report and its plots."""
