//! Kubernetes quantities (`250m`, `1.5Gi`, `12e6`) as exact numbers.
//!
//! They are exact, so that a limit above 2^53 bytes is not off by one: the value is a whole number of billionths, the
//! finest step of the API. The grammar is that of the API's `resource.Quantity`; negative amounts, which no
//! resource can have, are refused.

/// Billionths in one unit, and in one thousandth.
const NANO_PER_UNIT: u128 = 1_000_000_000;
const NANO_PER_MILLI: u128 = 1_000_000;
/// The API's largest quantity; larger ones are capped to it.
const MAX: Quantity = Quantity { nano: i64::MAX as u128 * NANO_PER_UNIT };

/// A non-negative amount of a resource.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord)]
pub struct Quantity {
    nano: u128,
}

impl Quantity {
    /// 0.
    pub const ZERO: Quantity = Quantity { nano: 0 };
    /// 1: one CPU core, or one byte.
    pub const ONE: Quantity = Quantity { nano: NANO_PER_UNIT };

    /// Parses a number with an optional suffix: `n u m k M G T P E`, `Ki` to `Ei`, or `e` with an exponent.
    ///
    /// # Errors
    /// [`InvalidQuantity`] when the text is no quantity, is negative, or has more digits than any real amount.
    pub fn parse(text: &str) -> Result<Quantity, InvalidQuantity> {
        parse(text).ok_or_else(|| InvalidQuantity(text.to_owned()))
    }

    /// This many thousandths; for cpu, of a core.
    pub fn from_milli(milli: u64) -> Quantity {
        Quantity { nano: u128::from(milli) * NANO_PER_MILLI }
    }

    /// This many whole units; for memory and storage, bytes.
    pub fn from_units(units: u64) -> Quantity {
        Quantity { nano: u128::from(units) * NANO_PER_UNIT }
    }

    /// The amount in thousandths, rounded up.
    pub fn milli(self) -> u128 {
        self.nano.div_ceil(NANO_PER_MILLI)
    }

    /// The amount in whole units, rounded up.
    pub fn units(self) -> u128 {
        self.nano.div_ceil(NANO_PER_UNIT)
    }

    /// Whether the amount is zero. The API reads an unset quantity as zero.
    pub fn is_zero(self) -> bool {
        self.nano == 0
    }
}

/// A text that is not the amount of a resource.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{0:?} is not a quantity; write a number with a suffix, such as 250m, 2 or 128Mi")]
pub struct InvalidQuantity(String);

fn parse(text: &str) -> Option<Quantity> {
    let text = text.strip_prefix('+').unwrap_or(text);
    let end = text.find(|c: char| !c.is_ascii_digit() && c != '.').unwrap_or(text.len());
    let (number, suffix) = text.split_at(end);
    let (whole, fraction) = number.split_once('.').unwrap_or((number, ""));
    if whole.is_empty() && fraction.is_empty() {
        return None;
    }
    // A second dot stays in the fraction and fails here.
    let mantissa: u128 = format!("{whole}{fraction}").parse().ok()?;
    let scale = Scale::parse(suffix)?;
    let exponent = scale.decimal.checked_add(9)?.checked_sub(i32::try_from(fraction.len()).ok()?)?;
    Some(scaled(mantissa, scale.binary, exponent).unwrap_or(MAX).min(MAX))
}

/// `mantissa × 1024^binary × 10^exponent` billionths, rounded up; none if the result does not fit into 128 bits.
fn scaled(mantissa: u128, binary: u32, exponent: i32) -> Option<Quantity> {
    let mantissa = mantissa.checked_mul(1024_u128.pow(binary))?;
    let power = 10_u128.checked_pow(exponent.unsigned_abs());
    let nano = match (exponent >= 0, power) {
        (true, Some(power)) => mantissa.checked_mul(power)?,
        (true, None) if mantissa > 0 => return None,
        (false, Some(power)) => mantissa.div_ceil(power),
        (_, None) => u128::from(mantissa > 0),
    };
    Some(Quantity { nano })
}

/// The factor of a suffix: `1024^binary × 10^decimal`.
struct Scale {
    binary: u32,
    decimal: i32,
}

impl Scale {
    fn parse(suffix: &str) -> Option<Scale> {
        let (binary, decimal) = match suffix {
            "" => (0, 0),
            "n" => (0, -9),
            "u" => (0, -6),
            "m" => (0, -3),
            "k" => (0, 3),
            "M" => (0, 6),
            "G" => (0, 9),
            "T" => (0, 12),
            "P" => (0, 15),
            "E" => (0, 18),
            "Ki" => (1, 0),
            "Mi" => (2, 0),
            "Gi" => (3, 0),
            "Ti" => (4, 0),
            "Pi" => (5, 0),
            "Ei" => (6, 0),
            _ => (0, suffix.strip_prefix(['e', 'E'])?.parse().ok()?),
        };
        Some(Scale { binary, decimal })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn milli(text: &str) -> u128 {
        Quantity::parse(text).expect(text).milli()
    }

    #[test]
    fn every_suffix_is_exact() {
        let rows = [
            ("1", 1_000),
            ("+2", 2_000),
            ("250m", 250),
            (".5", 500),
            ("1.", 1_000),
            ("1.5Ki", 1_536_000),
            ("1k", 1_000_000),
            ("1e3", 1_000_000),
            ("1E3", 1_000_000),
            ("12e-1", 1_200),
            ("1M", 1_000_000_000),
            ("1Mi", 1_048_576_000),
            ("1.5Gi", 1_610_612_736_000),
            ("1E", 1_000_000_000_000_000_000_000),
            ("1Ei", 1_152_921_504_606_846_976_000),
            ("9007199254740993", 9_007_199_254_740_993_000),
        ];
        for (text, expected) in rows {
            assert_eq!(milli(text), expected, "{text}");
        }
    }

    #[test]
    fn finer_amounts_are_rounded_up() {
        assert_eq!(milli("1u"), 1);
        assert_eq!(milli("0.1n"), 1);
        assert_eq!(milli("1e-300"), 1);
        assert_eq!(Quantity::parse("1500m").map(Quantity::units), Ok(2));
        assert_eq!(milli("0e99"), 0);
    }

    #[test]
    fn too_large_amounts_are_capped() {
        for text in ["8Ei", "1e30", "1e300", "99999999999999999999Ei"] {
            assert_eq!(Quantity::parse(text).map(Quantity::units), Ok(i64::MAX as u128), "{text}");
        }
    }

    #[test]
    fn other_texts_are_refused() {
        let too_long = "1".repeat(60);
        for text in
            ["", "Mi", ".", "-1", "--1", "+-1", "1.2.3", "1 Gi", "1KI", "nan", "inf", "1e", "0x1", "١", &too_long]
        {
            assert!(Quantity::parse(text).is_err(), "{text}");
        }
    }

    proptest! {
        #[test]
        fn no_text_makes_the_parser_panic(text in "[-+.0-9eEKMi]{0,50}") {
            let _ = Quantity::parse(&text);
        }

        #[test]
        fn whole_units_survive(units in 0..=i64::MAX as u64) {
            prop_assert_eq!(Quantity::parse(&units.to_string()), Ok(Quantity::from_units(units)));
        }
    }
}
