"""Each driver's summary, tables, verdicts and figures, from its rows alone."""
