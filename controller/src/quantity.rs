//! Canonical spellings of Kubernetes quantities.

use k8s_openapi::apimachinery::pkg::api::resource::Quantity;

/// The most whole mebibytes below 2^63 bytes, where the API server caps a quantity: what it keeps would differ for ever
/// from what was written.
const MOST_MEBIBYTES: u64 = (1 << 43) - 1;

/// A number of mebibytes in Kubernetes' canonical spelling: the largest binary unit that leaves a whole number.
pub(crate) fn mebibytes(mib: u64) -> Quantity {
    let (mut value, mut units) = (mib.min(MOST_MEBIBYTES), ["Mi", "Gi", "Ti", "Pi", "Ei"].iter());
    let mut unit = units.next();
    if value == 0 {
        return Quantity("0".to_owned());
    }
    while value.is_multiple_of(1024) && units.len() > 0 {
        value /= 1024;
        unit = units.next();
    }
    Quantity(format!("{value}{}", unit.copied().unwrap_or_default()))
}

/// A plain number.
pub(crate) fn count(count: u32) -> Quantity {
    Quantity(count.to_string())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn canonical_memory() {
        for (mib, text) in [
            (0, "0"),
            (1, "1Mi"),
            (81559, "81559Mi"),
            (10240, "10Gi"),
            (1536, "1536Mi"),
            (2 << 20, "2Ti"),
            (u64::MAX, "8796093022207Mi"),
        ] {
            assert_eq!(mebibytes(mib).0, text);
        }
    }
}
