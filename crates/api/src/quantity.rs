//! The exact values of Kubernetes quantities.

use k8s_openapi::apimachinery::pkg::api::resource::Quantity;

/// The value of a quantity in billionths, the finest that Kubernetes keeps.
///
/// The API server rewrites quantities (`10240Mi` becomes `10Gi`, `0.5` becomes `500m`), so they are compared by value.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Amount(i128);

impl Amount {
    const UNIT: i128 = 1_000_000_000;

    /// 1 Mi.
    pub const MEBIBYTE: Amount = Amount((1 << 20) * Amount::UNIT);

    /// Reads a quantity. `None` when it is not one, when it is finer than a billionth, or too large to be counted
    /// (above 10^29, where Kubernetes itself stops at 2^63).
    pub fn parse(text: &str) -> Option<Amount> {
        let (negative, rest) = match text.as_bytes().first()? {
            b'-' => (true, &text[1..]),
            b'+' => (false, &text[1..]),
            _ => (false, text),
        };
        let end = rest.find(|c: char| !c.is_ascii_digit() && c != '.').unwrap_or(rest.len());
        let (number, suffix) = rest.split_at(end);
        let (whole, fraction) = number.split_once('.').unwrap_or((number, ""));
        if (whole.is_empty() && fraction.is_empty()) || fraction.contains('.') {
            return None;
        }
        let (multiplier, power_of_ten) = scale(suffix)?;

        // value = digits * multiplier * 10^power, then in billionths.
        let digits = [whole, fraction].concat();
        let digits: i128 = digits.trim_start_matches('0').parse().or_else(|error| if_all_zero(&digits, error)).ok()?;
        let mut value = digits.checked_mul(multiplier)?;
        let mut power = power_of_ten.checked_add(9)?.checked_sub(i32::try_from(fraction.len()).ok()?)?;
        while power < 0 && value != 0 {
            if value % 10 != 0 {
                return None;
            }
            value /= 10;
            power += 1;
        }
        while power > 0 && value != 0 {
            value = value.checked_mul(10)?;
            power -= 1;
        }
        Some(Amount(if negative { -value } else { value }))
    }

    /// A spelling that is the same for equal values. Not Kubernetes' canonical one.
    pub fn to_normal_form(self) -> Quantity {
        if self.0 % Amount::UNIT == 0 {
            Quantity((self.0 / Amount::UNIT).to_string())
        } else {
            Quantity(format!("{}n", self.0))
        }
    }
}

/// `parse` refuses the empty text that is left of `0` or `000`.
fn if_all_zero(digits: &str, error: std::num::ParseIntError) -> Result<i128, std::num::ParseIntError> {
    if digits.bytes().all(|digit| digit == b'0') { Ok(0) } else { Err(error) }
}

/// The factor that a suffix stands for, and a power of ten beside it.
fn scale(suffix: &str) -> Option<(i128, i32)> {
    let power_of_two = |exponent: u32| Some((1_i128 << exponent, 0));
    match suffix {
        "" => Some((1, 0)),
        "n" => Some((1, -9)),
        "u" => Some((1, -6)),
        "m" => Some((1, -3)),
        "k" => Some((1, 3)),
        "M" => Some((1, 6)),
        "G" => Some((1, 9)),
        "T" => Some((1, 12)),
        "P" => Some((1, 15)),
        "E" => Some((1, 18)),
        "Ki" => power_of_two(10),
        "Mi" => power_of_two(20),
        "Gi" => power_of_two(30),
        "Ti" => power_of_two(40),
        "Pi" => power_of_two(50),
        "Ei" => power_of_two(60),
        exponent => Some((1, exponent.strip_prefix(['e', 'E'])?.parse().ok()?)),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn equal_values_in_any_spelling() {
        for spellings in [
            &["0", "00", "0.0", "-0", "0Ki", "0e9", ".0", "0n"][..],
            &["500m", "0.5", ".5", "+0.5", "5e-1", "500000u", "0.5000"],
            &["10Gi", "10240Mi", "10737418240", "10737418240000m", "1.0737418240e10"],
            &["1536Mi", "1.5Gi"],
            &["-1", "-1.0", "-1000m"],
            &["1k", "1000", "1e3", "1E3"],
            &["1E", "1000P"],
            &["4503599627370496Ki", "4Ei"],
        ] {
            let values: Vec<_> = spellings.iter().map(|text| Amount::parse(text).expect(text)).collect();
            assert!(values.windows(2).all(|pair| pair[0] == pair[1]), "{spellings:?}: {values:?}");
            assert!(values.windows(2).all(|pair| pair[0].to_normal_form() == pair[1].to_normal_form()));
            assert_eq!(Amount::parse(&values[0].to_normal_form().0), Some(values[0]));
        }
        assert!(Amount::parse("1Gi") > Amount::parse("1G"));
        assert_eq!(Amount::parse("1024Ki"), Some(Amount::MEBIBYTE));
        assert!(Amount::parse("-1") < Amount::parse("1n"));
    }

    #[test]
    fn what_is_no_quantity() {
        for text in
            ["", "-", "Mi", ".", "1.2.3", "1 Gi", "1gi", "0x10", "1e", "1ee3", "0.1n", "9e99", "1e999999999999", "١"]
        {
            assert_eq!(Amount::parse(text), None, "{text:?}");
        }
    }
}
