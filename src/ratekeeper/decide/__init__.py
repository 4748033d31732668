"""Stage 3: yes or no. Pure algorithms, the engines that run them atomically, and their stores."""
