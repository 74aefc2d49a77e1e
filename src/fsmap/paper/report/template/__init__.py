"""Files of the report page: HTML (jinja2), CSS and JavaScript."""
