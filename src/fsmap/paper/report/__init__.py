"""Tables, figures and the page, made from rows. Imports no experiment and trains nothing."""
