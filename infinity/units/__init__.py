"""One offloaded unit and those around it: its weights, update and gradients; who goes, who comes, and in what order."""
