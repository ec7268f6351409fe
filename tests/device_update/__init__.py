"""The updates of states on a device against the native kernel; the device is the CPU."""
