//! kerf's NVML code against libraries that are loaded as a driver's is.

mod old_driver;
