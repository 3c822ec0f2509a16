//! NVML's private interface, of which nvidia-smi asks for a table of functions before anything else.
//!
//! What the functions do is not published. A table that begins with its size and whose functions all return 0 lets
//! nvidia-smi go on; what uses them for its purpose (`compute-policy`) says that it is not initialised.

use std::ffi::{c_int, c_void};

/// More entries than any caller was seen to use.
const ENTRIES: usize = 512;

#[repr(C)]
struct Table {
    size: usize,
    functions: [extern "C" fn() -> c_int; ENTRIES],
}

extern "C" fn nothing() -> c_int {
    0
}

static TABLE: Table = Table { size: size_of::<Table>(), functions: [nothing; ENTRIES] };

/// A pointer to the table, for a C caller that only reads it.
#[derive(Clone, Copy)]
#[repr(transparent)]
struct TablePointer(*const c_void);

#[unsafe(no_mangle)]
extern "C" fn nvmlInternalGetExportTable(table: super::out::Out<TablePointer>, _id: *const c_void) -> super::Ret {
    // The field is read here only so that the compiler sees that the table has a size.
    debug_assert_eq!(TABLE.size, size_of_val(&TABLE.functions) + size_of::<usize>());
    table.put(TablePointer((&raw const TABLE).cast())).err().map_or(0, |code| code.0)
}
