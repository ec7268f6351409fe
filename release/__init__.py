"""Programs that make the wheel and try it: `make wheel`, `make wheel-test`."""
