"""What every driver is built on: configs, resumable rows, statistics, claims, tables, plots."""
