"""HTML pages with tables and plots: of training runs, and of fits of scaling laws."""
