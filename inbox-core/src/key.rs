//! [`ConsumerGroup`], and [`Key`]: what a record is filed under.

use std::fmt;
use std::str::FromStr;
use std::sync::Arc;

use crate::{Error, MessageId, Result, check_name};

/// The logical consumer: every process that shares the work of one consumer has the same group, and each group handles
/// a message once.
///
/// 1 to 255 bytes of UTF-8 without control characters; compared byte for byte. Cheap to clone.
///
/// ```
/// use inbox_core::ConsumerGroup;
///
/// let billing = ConsumerGroup::new("billing")?;
/// assert_eq!(billing.as_str(), "billing");
/// assert!(ConsumerGroup::new("").is_err());
/// # Ok::<_, inbox_core::Error>(())
/// ```
#[derive(Clone, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct ConsumerGroup(Arc<str>);

impl ConsumerGroup {
    /// The longest name, in bytes.
    pub const MAX_BYTES: usize = 255;

    /// The group of this name.
    ///
    /// # Errors
    ///
    /// [`ErrorKind::InvalidInput`](crate::ErrorKind::InvalidInput) if the name is empty, longer than [`MAX_BYTES`](Self::MAX_BYTES) bytes, or has a
    /// control character in it.
    pub fn new(name: impl AsRef<str>) -> Result<Self> {
        let name = name.as_ref();
        check_name("consumer group", name, Self::MAX_BYTES)?;
        Ok(Self(name.into()))
    }

    /// The name.
    pub fn as_str(&self) -> &str {
        &self.0
    }
}

impl fmt::Display for ConsumerGroup {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

impl fmt::Debug for ConsumerGroup {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "ConsumerGroup({:?})", self.as_str())
    }
}

impl FromStr for ConsumerGroup {
    type Err = Error;

    fn from_str(name: &str) -> Result<Self> {
        Self::new(name)
    }
}

impl TryFrom<&str> for ConsumerGroup {
    type Error = Error;

    fn try_from(name: &str) -> Result<Self> {
        Self::new(name)
    }
}

impl TryFrom<&String> for ConsumerGroup {
    type Error = Error;

    fn try_from(name: &String) -> Result<Self> {
        Self::new(name)
    }
}

impl TryFrom<String> for ConsumerGroup {
    type Error = Error;

    fn try_from(name: String) -> Result<Self> {
        Self::new(name)
    }
}

/// What a record is filed under: a message and the group that handles it.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Key {
    group: ConsumerGroup,
    id: MessageId,
}

impl Key {
    /// The message `id` as `group` handles it.
    pub const fn new(group: ConsumerGroup, id: MessageId) -> Self {
        Self { group, id }
    }

    /// Whose record it is.
    pub const fn group(&self) -> &ConsumerGroup {
        &self.group
    }

    /// Of which message.
    pub const fn id(&self) -> MessageId {
        self.id
    }
}

impl fmt::Display for Key {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "message {} in group {}", self.id, self.group)
    }
}
