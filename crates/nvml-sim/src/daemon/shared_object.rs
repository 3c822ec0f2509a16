//! A shared library without anything in it: what the dynamic linker and its cache need to know a library by its SONAME.

/// ELF for this machine (System V ABI, "Object Files"; `e_machine` of its processor supplements).
const MACHINE: u16 = if cfg!(target_arch = "aarch64") { 183 } else { 62 };

const HEADER: u64 = 64;
const PROGRAM_HEADER: u64 = 56;
const DYNAMIC_ENTRY: u64 = 16;

/// Dynamic tags.
const DT_NULL: u64 = 0;
const DT_HASH: u64 = 4;
const DT_STRTAB: u64 = 5;
const DT_SYMTAB: u64 = 6;
const DT_STRSZ: u64 = 10;
const DT_SYMENT: u64 = 11;
const DT_SONAME: u64 = 14;

/// Segment types and flags.
const PT_LOAD: u32 = 1;
const PT_DYNAMIC: u32 = 2;
const PT_GNU_STACK: u32 = 0x6474_e551;
const READ_WRITE: u32 = 6;

/// A symbol table holds one empty entry, and the hash table one bucket for it.
const SYMBOL: u64 = 24;
const HASH: [u32; 4] = [1, 1, 0, 0];

/// The library as a file. It is mapped as it lies: every address is an offset.
pub(super) fn shared_object(soname: &str) -> Vec<u8> {
    let segments = 3;
    let dynamic = HEADER + segments * PROGRAM_HEADER;
    let symbols = dynamic + 7 * DYNAMIC_ENTRY;
    let hash = symbols + SYMBOL;
    let strings = hash + 16;
    let names = format!("\0{soname}\0");
    let end = strings + names.len() as u64;

    let mut file = Vec::new();
    file.extend(b"\x7fELF\x02\x01\x01");
    file.resize(16, 0);
    let half = |file: &mut Vec<u8>, value: u16| file.extend(value.to_le_bytes());
    let word = |file: &mut Vec<u8>, value: u32| file.extend(value.to_le_bytes());
    let long = |file: &mut Vec<u8>, value: u64| file.extend(value.to_le_bytes());

    half(&mut file, 3); // a shared object
    half(&mut file, MACHINE);
    word(&mut file, 1);
    [0, HEADER, 0].into_iter().for_each(|value| long(&mut file, value)); // entry, program headers, sections
    word(&mut file, 0);
    [HEADER as u16, PROGRAM_HEADER as u16, segments as u16, 64, 0, 0]
        .into_iter()
        .for_each(|value| half(&mut file, value));

    for (kind, offset, size, align) in
        [(PT_LOAD, 0, end, 0x1_0000), (PT_DYNAMIC, dynamic, symbols - dynamic, 8), (PT_GNU_STACK, 0, 0, 16)]
    {
        word(&mut file, kind);
        word(&mut file, READ_WRITE);
        [offset, offset, offset, size, size, align].into_iter().for_each(|value| long(&mut file, value));
    }
    for (tag, value) in [
        (DT_SONAME, 1),
        (DT_HASH, hash),
        (DT_STRTAB, strings),
        (DT_SYMTAB, symbols),
        (DT_STRSZ, names.len() as u64),
        (DT_SYMENT, SYMBOL),
        (DT_NULL, 0),
    ] {
        long(&mut file, tag);
        long(&mut file, value);
    }
    file.resize(hash as usize, 0);
    HASH.into_iter().for_each(|value| word(&mut file, value));
    file.extend(names.as_bytes());
    file
}

#[cfg(test)]
mod tests {
    use std::ffi::CString;
    use std::fs;

    use super::*;

    /// The dynamic linker is the judge.
    #[test]
    #[expect(unsafe_code, reason = "to load a library is to run it")]
    fn the_linker_loads_it() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("libcuda.so.535.261.03");
        fs::write(&path, shared_object("libcuda.so.1")).unwrap();
        let name = CString::new(path.to_str().unwrap()).unwrap();
        // SAFETY: `name` ends with a zero byte, and the library has no code that could run.
        let handle = unsafe { libc::dlopen(name.as_ptr(), libc::RTLD_NOW | libc::RTLD_LOCAL) };
        assert!(!handle.is_null());
    }
}
