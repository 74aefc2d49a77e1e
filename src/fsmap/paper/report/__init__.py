"""Rows, tables, figures and the page. Reads folders; trains nothing, knows no experiment."""
