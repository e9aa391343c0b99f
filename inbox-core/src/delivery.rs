//! [`Delivery`]: one handing-over of a message, as far as the inbox is concerned; and its [`Fingerprint`].

use std::fmt;

use sha2::{Digest, Sha256};

use crate::{Error, MessageId, Result};

/// One delivery of a message: its id and, if the caller wants payloads compared, a fingerprint of its payload.
///
/// Every method that claims takes `impl Into<Delivery>`, and a [`MessageId`] is a delivery without a fingerprint:
///
/// ```
/// # use inbox_core::{Inbox, MemoryInbox, MessageId};
/// # #[tokio::main(flavor = "current_thread")] async fn main() -> inbox_core::Result<()> {
/// # let inbox = Inbox::new(MemoryInbox::new(), "billing")?;
/// # let (id, payload) = (MessageId::new("order-17")?, b"{}");
/// inbox.process(id, async |_tx| Ok::<_, inbox_core::Error>(())).await?;
/// inbox.process(id.with_payload(payload), async |_tx| Ok::<_, inbox_core::Error>(())).await?;
/// # Ok(()) }
/// ```
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Delivery {
    id: MessageId,
    fingerprint: Option<Fingerprint>,
}

impl Delivery {
    /// A delivery of the message `id`, without a fingerprint.
    pub const fn new(id: MessageId) -> Self {
        Self { id, fingerprint: None }
    }

    /// The same delivery with a fingerprint of its payload.
    #[must_use]
    pub const fn with_fingerprint(mut self, fingerprint: Fingerprint) -> Self {
        self.fingerprint = Some(fingerprint);
        self
    }

    /// Which message this is a delivery of.
    pub const fn id(&self) -> MessageId {
        self.id
    }

    /// The payload's fingerprint, if the caller wants payloads compared.
    pub const fn fingerprint(&self) -> Option<Fingerprint> {
        self.fingerprint
    }
}

impl From<MessageId> for Delivery {
    fn from(id: MessageId) -> Self {
        Self::new(id)
    }
}

/// So that [`Inbox::process_batch`](crate::Inbox::process_batch) takes ids as they are read, unreadable ones among them.
impl TryFrom<Result<MessageId>> for Delivery {
    type Error = Error;

    fn try_from(id: Result<MessageId>) -> Result<Self> {
        id.map(Self::new)
    }
}

/// A digest of a message's payload, kept beside its record: the first 16 bytes of the payload's SHA-256 (FIPS 180-4).
///
/// Off unless asked for. A claim with a fingerprint stores it; a later claim of the same id and group with **another**
/// fingerprint is [`ErrorKind::PayloadMismatch`](crate::ErrorKind::PayloadMismatch) instead of a duplicate, because two
/// different messages then bear one id, and to skip the second would lose it. Where either side has none, nothing is
/// compared. Take the bytes that are the same in every delivery: the payload as the broker keeps it, not a
/// re-serialised form and no headers that a relay changes.
#[derive(Clone, Copy, PartialEq, Eq, Hash)]
pub struct Fingerprint([u8; 16]);

impl Fingerprint {
    /// The fingerprint of `payload`.
    pub fn of(payload: impl AsRef<[u8]>) -> Self {
        let digest = Sha256::digest(payload.as_ref());
        let mut bytes = [0; 16];
        bytes.copy_from_slice(&digest[..16]);
        Self(bytes)
    }

    /// The fingerprint that a store kept as these bytes.
    pub const fn from_bytes(bytes: [u8; 16]) -> Self {
        Self(bytes)
    }

    /// The 16 bytes, as a store keeps them.
    pub const fn as_bytes(&self) -> &[u8; 16] {
        &self.0
    }
}

impl fmt::Display for Fingerprint {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.iter().try_for_each(|byte| write!(f, "{byte:02x}"))
    }
}

impl fmt::Debug for Fingerprint {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Fingerprint({self})")
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_fingerprint_is_the_head_of_the_published_digest() {
        // FIPS 180-4's example: SHA-256("abc") begins ba7816bf 8f01cfea 414140de 5dae2223.
        assert_eq!(Fingerprint::of("abc").to_string(), "ba7816bf8f01cfea414140de5dae2223");
    }
}
