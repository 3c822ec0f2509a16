//! NVML's C ABI.
//!
//! Each exported function takes NVML's arguments, asks the daemon and writes the answer into NVML's structures, whose
//! layout comes from `nvml-wrapper-sys`. Functions that NVML has and this library has not are absent, as in an older
//! driver, except those without which `nvidia-smi` does not start: they say `NVML_ERROR_NOT_SUPPORTED`.
//!
//! Architecture invariant: pointers that a caller passed are dereferenced in `out.rs` only.
#![expect(unsafe_code, reason = "exported symbols and C pointers")]

mod call;
mod device;
mod event;
mod export_table;
mod mig;
mod mig_compute;
mod monitor;
mod out;
mod process;
mod system;
mod unsupported;

use std::ffi::c_uint;

/// `nvmlReturn_t`.
type Ret = c_uint;

/// Exports NVML functions: `fn name(call, arguments) -> Type { body }`, several names for one body separated by `|`.
///
/// The body is a closure's that returns a `Result` with a [`Code`](crate::code::Code), and may ask the daemon through
/// `call`. With a type, there is a last C argument more, a pointer to where the value goes; a null pointer is refused
/// before the body runs. One use in a module; the names are in `EXPORTED`.
macro_rules! export {
    ($($(#[$doc:meta])* fn $name:ident $(| $alias:ident)* ($($args:tt)*) $(-> $out:ty)? $body:block)*) => {
        pub(super) const EXPORTED: &[&str] = &[$(stringify!($name), $(stringify!($alias),)*)*];
        $(export! { @names [$name $($alias)*] ($($args)*) [$($out)?] $body })*
    };
    (@names [] $args:tt $out:tt $body:tt) => {};
    (@names [$name:ident $($rest:ident)*] $args:tt $out:tt $body:tt) => {
        export! { @one $name $args $out $body }
        export! { @names [$($rest)*] $args $out $body }
    };
    (@one $name:ident ($call:ident $(, $arg:ident: $ty:ty)* $(,)?) [] $body:tt) => {
        #[unsafe(no_mangle)]
        extern "C" fn $name($($arg: $ty),*) -> $crate::abi::Ret {
            $crate::abi::call::enter(stringify!($name), |$call| $body)
        }
    };
    (@one $name:ident ($call:ident $(, $arg:ident: $ty:ty)* $(,)?) [$out:ty] $body:tt) => {
        #[unsafe(no_mangle)]
        extern "C" fn $name($($arg: $ty,)* out: $crate::abi::out::Out<$out>) -> $crate::abi::Ret {
            $crate::abi::call::enter(stringify!($name), |$call| {
                out.given()?;
                let body = || -> Result<$out, $crate::code::Code> { $body };
                out.put(body()?)
            })
        }
    };
}
use export;

/// Whether there is an exported function that asks the daemon and of which `holds` is true.
pub(crate) fn answers(holds: impl Fn(&str) -> bool) -> bool {
    let modules = [
        system::LIFE,
        system::EXPORTED,
        device::EXPORTED,
        event::EXPORTED,
        mig::EXPORTED,
        mig_compute::EXPORTED,
        monitor::EXPORTED,
        process::EXPORTED,
    ];
    modules.into_iter().flatten().any(|function| holds(function))
}
