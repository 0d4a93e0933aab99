"""Programs for the devices' own compilers, and what these say of them."""
