//! A program that carries another one: how the front of nvidia-smi holds the genuine program.
//!
//! A container gets the one file `usr/bin/nvidia-smi`, so both have to be in it: the carried program is appended to the
//! front, followed by its length (64 bits, little-endian) and a mark.

use std::fs::File;
use std::io::{self, Read, Seek, SeekFrom};

const MARK: &[u8; 16] = b"kerf-nvml-sim\0p1";

/// The end of a file that carries `payload`.
pub fn append(file: &mut Vec<u8>, payload: &[u8]) {
    file.extend_from_slice(payload);
    file.extend_from_slice(&(payload.len() as u64).to_le_bytes());
    file.extend_from_slice(MARK);
}

/// The program that a file carries, if any. Reads from `file` up to its end.
///
/// # Errors
///
/// Those of the file.
pub fn extract(file: &mut File) -> io::Result<Option<Vec<u8>>> {
    let trailer = (8 + MARK.len()) as u64;
    let Some(end) = file.metadata()?.len().checked_sub(trailer) else { return Ok(None) };
    let (mut length, mut mark) = ([0; 8], [0; MARK.len()]);
    file.seek(SeekFrom::Start(end))?;
    file.read_exact(&mut length)?;
    file.read_exact(&mut mark)?;
    let Some(start) = end.checked_sub(u64::from_le_bytes(length)).filter(|_| mark == *MARK) else { return Ok(None) };
    file.seek(SeekFrom::Start(start))?;
    let mut payload = Vec::new();
    file.take(end - start).read_to_end(&mut payload)?;
    Ok(Some(payload))
}

#[cfg(test)]
mod tests {
    use std::io::Write;

    use super::*;

    fn file_of(content: &[u8]) -> File {
        let mut file = tempfile::tempfile().unwrap();
        file.write_all(content).unwrap();
        file
    }

    #[test]
    fn what_was_appended_comes_out() {
        let mut content = b"front".to_vec();
        append(&mut content, b"genuine");
        assert_eq!(extract(&mut file_of(&content)).unwrap().as_deref(), Some(&b"genuine"[..]));
    }

    #[test]
    fn a_file_without_payload_carries_none() {
        for content in [&b""[..], b"short", &[0x7f; 4096]] {
            assert_eq!(extract(&mut file_of(content)).unwrap(), None);
        }
    }
}
