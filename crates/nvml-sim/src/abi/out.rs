//! Pointers that a caller passed.
//!
//! SAFETY, for every block here: NVML's contract is that a pointer argument is null, which is checked, or points to as
//! much memory as the function's documentation says, which is what the type and the length given here say again.

use std::ffi::{CStr, c_char, c_uint};

use crate::code::Code;

/// A C argument that points to a `T`, or to the first of several.
#[repr(transparent)]
pub(super) struct Out<T>(*mut T);

impl<T> Clone for Out<T> {
    fn clone(&self) -> Self {
        *self
    }
}

impl<T> Copy for Out<T> {}

impl<T: Copy> Out<T> {
    pub(super) fn is_null(self) -> bool {
        self.0.is_null()
    }

    /// That there is a pointer at all.
    pub(super) fn given(self) -> Result<(), Code> {
        if self.is_null() { Err(Code::INVALID_ARGUMENT) } else { Ok(()) }
    }

    /// Writes the value.
    pub(super) fn put(self, value: T) -> Result<(), Code> {
        self.given()?;
        // SAFETY: see the head of this module.
        unsafe { self.0.write_unaligned(value) };
        Ok(())
    }

    /// Reads the value.
    pub(super) fn get(self) -> Result<T, Code> {
        self.given()?;
        // SAFETY: see the head of this module.
        Ok(unsafe { self.0.read_unaligned() })
    }

    /// The same memory as another version of the structure.
    pub(super) fn cast<U>(self) -> Out<U> {
        Out(self.0.cast())
    }

    /// The version word at the head of a structure that has one.
    pub(super) fn version(self) -> Result<c_uint, Code> {
        self.cast::<c_uint>().get()
    }

    /// The element at an index.
    pub(super) fn at(self, index: usize) -> Out<T> {
        Out(self.0.wrapping_add(index))
    }

    /// Writes a list into an array of `capacity` elements and its length to `count`. Of an array that is too small only
    /// the length is told.
    pub(super) fn list(self, capacity: usize, count: Out<c_uint>, items: &[T]) -> Result<(), Code> {
        count.put(items.len() as c_uint)?;
        if items.len() > capacity {
            return Err(Code::INSUFFICIENT_SIZE);
        }
        items.iter().enumerate().try_for_each(|(index, item)| self.at(index).put(*item))
    }
}

impl Out<c_char> {
    /// Writes a text with its end mark into a buffer of this length.
    pub(super) fn text(self, length: c_uint, text: &str) -> Result<(), Code> {
        self.given()?;
        if text.len() >= length as usize {
            return Err(Code::INSUFFICIENT_SIZE);
        }
        let bytes = text.bytes().chain([0]).enumerate();
        bytes.into_iter().try_for_each(|(index, byte)| self.at(index).put(byte as c_char))
    }
}

/// A C argument that is a text.
#[repr(transparent)]
pub(super) struct Text(*const c_char);

impl Text {
    pub(super) fn get(&self) -> Result<String, Code> {
        if self.0.is_null() {
            return Err(Code::INVALID_ARGUMENT);
        }
        // SAFETY: see the head of this module.
        let text = unsafe { CStr::from_ptr(self.0) };
        Ok(text.to_string_lossy().into_owned())
    }
}

/// A text in a structure's field.
pub(super) fn field<const N: usize>(text: &str) -> [c_char; N] {
    let mut field = [0; N];
    for (place, byte) in field.iter_mut().take(N - 1).zip(text.bytes()) {
        *place = byte as c_char;
    }
    field
}

/// The version word of a structure (nvml.h, `NVML_STRUCT_VERSION`): its size and its version.
pub(super) const fn version_of<T>(version: u32) -> c_uint {
    size_of::<T>() as c_uint | version << 24
}
