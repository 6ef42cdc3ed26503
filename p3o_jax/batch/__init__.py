"""Arrays that pass between the parts of a run, and the statistics, metrics and advantages computed from them."""
