"""What makes the wheel, and tries it: `make wheel`, `make wheel-test`."""
