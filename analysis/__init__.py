"""Tables, plots and reports of finished runs."""
