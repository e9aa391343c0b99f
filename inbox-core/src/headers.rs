//! [`Headers`]: what a broker carries beside a payload.

use std::fmt;

use serde_json::Value;

use crate::{Error, ErrorKind, Result};

/// The headers of a message: names and values in the broker's order, names more than once where the broker has them so.
///
/// Values are bytes, because Kafka's are; most are text, and [`get`](Self::get) reads those.
///
/// ```
/// use inbox_core::Headers;
///
/// let headers = Headers::from_iter([("Nats-Msg-Id", "order-17"), ("traceparent", "00-...")]);
/// assert_eq!(headers.get("Nats-Msg-Id"), Some("order-17"));
/// assert_eq!(Headers::from_json(&headers.to_json())?, headers);
/// # Ok::<_, inbox_core::Error>(())
/// ```
#[derive(Clone, PartialEq, Eq, Default)]
pub struct Headers(Vec<(String, Vec<u8>)>);

impl Headers {
    /// No headers.
    pub const fn new() -> Self {
        Self(Vec::new())
    }

    /// Adds a header behind the others.
    pub fn push(&mut self, name: impl Into<String>, value: impl Into<Vec<u8>>) {
        self.0.push((name.into(), value.into()));
    }

    /// The first value under exactly this name that is text.
    pub fn get(&self, name: &str) -> Option<&str> {
        self.iter()
            .filter(|(own, _)| *own == name)
            .find_map(|(_, value)| std::str::from_utf8(value).ok())
    }

    /// All headers, in order.
    pub fn iter(&self) -> impl Iterator<Item = (&str, &[u8])> {
        self.0.iter().map(|(name, value)| (name.as_str(), value.as_slice()))
    }

    /// How many there are.
    pub fn len(&self) -> usize {
        self.0.len()
    }

    /// Whether there are none.
    pub fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    /// As stores keep them, for people and other programs to read: `[["Nats-Msg-Id","order-17"],...]`, with a value that is
    /// no text as a list of its bytes.
    pub fn to_json(&self) -> String {
        let pairs = self.iter().map(|(name, value)| {
            let value = std::str::from_utf8(value).map_or_else(|_| Value::from(value), Value::from);
            Value::Array(vec![name.into(), value])
        });
        Value::Array(pairs.collect()).to_string()
    }

    /// Reads what [`to_json`](Self::to_json) wrote.
    ///
    /// # Errors
    ///
    /// [`ErrorKind::Store`] if it is anything else: somebody changed what a store keeps.
    pub fn from_json(json: &str) -> Result<Self> {
        let read = |json| -> Option<Self> {
            let pairs: Vec<(String, Value)> = serde_json::from_str(json).ok()?;
            let pairs = pairs.into_iter().map(|(name, value)| {
                let bytes = match value {
                    Value::String(text) => text.into_bytes(),
                    bytes => serde_json::from_value(bytes).ok()?,
                };
                Some((name, bytes))
            });
            pairs.collect::<Option<_>>().map(Self)
        };
        read(json).ok_or_else(|| {
            Error::new(
                ErrorKind::Store,
                "the headers of a dead letter cannot be read, as somebody changed what the store keeps; they must be a \
                 JSON list of pairs",
            )
        })
    }
}

impl<N: Into<String>, V: Into<Vec<u8>>> FromIterator<(N, V)> for Headers {
    fn from_iter<I: IntoIterator<Item = (N, V)>>(pairs: I) -> Self {
        let pairs = pairs.into_iter().map(|(name, value)| (name.into(), value.into()));
        Self(pairs.collect())
    }
}

/// Names only: values may be secret.
impl fmt::Debug for Headers {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_list().entries(self.0.iter().map(|(name, _)| name)).finish()
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    proptest! {
        #[test]
        fn headers_are_read_as_they_were_written(pairs: Vec<(String, Vec<u8>)>) {
            let headers = Headers::from_iter(pairs);
            prop_assert_eq!(Headers::from_json(&headers.to_json()).unwrap(), headers);
        }
    }

    #[test]
    fn what_is_no_list_of_pairs_is_refused() {
        for foreign in ["", "{}", "[1]", r#"[["a"]]"#, r#"[["a",1]]"#, r#"[["a",[256]]]"#] {
            let error = Headers::from_json(foreign).unwrap_err();
            assert_eq!(error.kind(), ErrorKind::Store, "{foreign}");
        }
    }

    #[test]
    fn a_name_twice_stays_so_and_the_first_is_read() {
        let headers = Headers::from_iter([("a", "1"), ("A", "2"), ("a", "3")]);
        assert_eq!(
            (headers.len(), headers.get("a"), headers.get("b")),
            (3, Some("1"), None)
        );
    }
}
