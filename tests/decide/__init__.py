"""Stage 3, decide: algorithms as tables, and what turns their outcomes into a decision."""
