//! Names in Kubernetes: RFC 1123 labels, and subdomains made of them.

/// A DNS label: letters in lower case, digits and dashes, no dash at an end, at most 63 bytes.
pub(crate) fn is_label(name: &str) -> bool {
    let (head, tail) = (name.bytes().next(), name.bytes().last());
    let plain = |byte: u8| matches!(byte, b'a'..=b'z' | b'0'..=b'9');
    name.len() <= 63
        && head.is_some_and(plain)
        && tail.is_some_and(plain)
        && name.bytes().all(|byte| plain(byte) || byte == b'-')
}

/// A DNS subdomain: what an object may be called.
pub(crate) fn is_subdomain(name: &str) -> bool {
    let plain = |part: &str| part.split('-').all(|piece| piece.bytes().all(|b| matches!(b, b'a'..=b'z' | b'0'..=b'9')));
    name.len() <= 253
        && name.split('.').all(|part| !part.is_empty() && !part.starts_with('-') && !part.ends_with('-') && plain(part))
}
