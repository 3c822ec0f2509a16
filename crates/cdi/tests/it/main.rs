//! The crate through its public interface: what it writes, what it refuses, and what a directory holds at any moment.

#![expect(clippy::unwrap_used, reason = "a panic is how a test fails")]

mod arbitrary;
mod dir;
mod document;
mod round_trip;
mod rules;
mod samples;
mod versions;
