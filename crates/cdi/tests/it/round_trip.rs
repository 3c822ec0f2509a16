//! Whatever is valid survives being written and read.

use kerf_cdi::Spec;
use proptest::prelude::*;

use crate::arbitrary;

proptest! {
    #[test]
    fn what_is_written_is_read(spec in arbitrary::spec()) {
        let json = spec.to_json().unwrap();
        prop_assert_eq!(&Spec::from_json(&json).unwrap(), &spec);
        prop_assert_eq!(spec.clone().to_json().unwrap(), json);
    }
}
