"""What the benchmark times, and how."""
