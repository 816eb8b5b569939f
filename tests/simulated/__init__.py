"""An accelerator in host memory, `simulated:0` to `simulated:3`, whose streams are threads; see `device.cpp`."""
