"""Every program in examples/ runs and checks itself."""
