"""Tables, plots and reports: of finished runs, and of what codecs do to real gradients."""
