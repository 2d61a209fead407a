"""Published silent bugs, planted one at a time into the check that verify runs."""
