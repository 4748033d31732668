"""What users import for their own tests."""
