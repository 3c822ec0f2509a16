//! Waiting for the end.
#![expect(unsafe_code, reason = "signal masks have no safe interface in std or rustix")]

use std::io;
use std::mem::MaybeUninit;

/// SIGTERM and SIGINT, kept from ending the process at once.
#[derive(Debug)]
pub struct TermSignals(libc::sigset_t);

impl TermSignals {
    /// Blocks the signals in this thread and in all that it starts.
    ///
    /// # Errors
    ///
    /// Those of the kernel.
    pub fn block() -> io::Result<TermSignals> {
        let mut set = MaybeUninit::uninit();
        // SAFETY: sigemptyset initialises the set that the calls after it use; all pointers are to live memory of ours.
        let (set, errno) = unsafe {
            libc::sigemptyset(set.as_mut_ptr());
            let mut set = set.assume_init();
            libc::sigaddset(&raw mut set, libc::SIGTERM);
            libc::sigaddset(&raw mut set, libc::SIGINT);
            (set, libc::pthread_sigmask(libc::SIG_BLOCK, &raw const set, std::ptr::null_mut()))
        };
        if errno == 0 { Ok(TermSignals(set)) } else { Err(io::Error::from_raw_os_error(errno)) }
    }

    /// Waits until one of them comes.
    ///
    /// # Errors
    ///
    /// Those of the kernel.
    pub fn wait(&self) -> io::Result<()> {
        let mut signal = 0;
        // SAFETY: both pointers are to live memory of ours, and the set is initialised.
        let errno = unsafe { libc::sigwait(&raw const self.0, &raw mut signal) };
        if errno == 0 { Ok(()) } else { Err(io::Error::from_raw_os_error(errno)) }
    }
}
