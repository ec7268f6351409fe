"""What is done with one offloaded model as a whole: it is opened, filled, gathered, read exactly, resumed, pinned."""
