"""Devices: cpu, cuda, npu. The only place that names a vendor."""
