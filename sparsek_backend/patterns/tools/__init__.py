"""Tools around patterns: learning from texts, statistics, figures, conversion, the command line."""
