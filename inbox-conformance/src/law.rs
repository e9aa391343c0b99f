//! [`Law`]: what every store must keep to, and the one list of all of them.

use std::fmt;

/// The list of all laws: variant, name and promise of each, handed to the macro `$then` behind what it was given.
///
/// [`Law`] and the tests of [`laws!`](crate::laws) are both made from it, so a law cannot be in one and not in the
/// other.
#[doc(hidden)]
#[macro_export]
macro_rules! __each_law {
    ($then:ident! { $($given:tt)* }) => {
        $crate::$then! {
            $($given)*
            First first
                "The first claim of a message is New; after its commit every later one is Duplicate, with the time.";
            Rollback rollback
                "A rollback undoes the claim, however it comes: asked for, by drop, by a dead connection, by a dropped \
                 future.";
            Together together
                "Claim and effects commit together or not at all.";
            Once once
                "Of any number of concurrent consumers of a message exactly one commits; the others learn that it is \
                 done.";
            Handover handover
                "If the consumer that was first rolls back, one that waits or comes again gets the message.";
            Usable usable
                "After Duplicate or `InFlight` the caller's transaction works on.";
            SameTransaction same_transaction
                "A second claim of a message in one transaction is Duplicate.";
            Groups groups
                "Groups are independent, and neither groups nor ids that differ in anything at all are confused.";
            Batches batches
                "A batch is answered in the order asked, takes a repeated id once, may be large, and never deadlocks.";
            Purge purge
                "A purge removes what is older than asked and nothing else, in bounded steps, while claims go on.";
            Clock clock
                "The store's clock decides what is old, never the consumer's.";
            Isolation isolation
                "At every isolation level the answer is right or a retryable error.";
            Setup setup
                "Setup twice, or by ten at once, is the same as once; without it, errors name it.";
            BadInput bad_input
                "Bad input is refused with an error that shows it, before anything is written.";
            Fingerprint fingerprint
                "A claim's fingerprint is stored with it and reported with every Duplicate.";
            DeadLetters dead_letters
                "A dead letter commits with its claim, comes back whole, is listed in order, put back once, and deleted \
                 without harm.";
        }
    };
}

#[doc(hidden)]
#[macro_export]
macro_rules! __law_enum {
    ($($law:ident $name:ident $promise:literal;)*) => {
        /// One law of the suite.
        #[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
        #[non_exhaustive]
        pub enum Law {
            $(#[doc = $promise] $law,)*
        }

        impl Law {
            /// All laws, in the order in which they are best read and run.
            pub const ALL: &'static [Self] = &[$(Self::$law),*];

            /// The law's name: that of its test, and what [`named`](Self::named) takes.
            pub const fn name(self) -> &'static str {
                match self {
                    $(Self::$law => stringify!($name),)*
                }
            }

            /// What the law promises, in a sentence.
            pub const fn promise(self) -> &'static str {
                match self {
                    $(Self::$law => $promise,)*
                }
            }
        }
    };
}

__each_law! { __law_enum! {} }

impl Law {
    /// The law of this [`name`](Self::name).
    ///
    /// ```
    /// use inbox_conformance::Law;
    ///
    /// assert_eq!(Law::named("once"), Some(Law::Once));
    /// assert_eq!(Law::named("twice"), None);
    /// ```
    pub fn named(name: &str) -> Option<Self> {
        Self::ALL.iter().copied().find(|law| law.name() == name)
    }

    /// The mistakes that usually are behind a failure of this law. The suite's own tests make each of them in a small
    /// store, and see the law fail.
    pub const fn usual_mistakes(self) -> &'static str {
        match self {
            Self::First => {
                "a commit that reports success for a transaction which had failed; a record without a time, or one whose \
                 time every duplicate moves (an upsert); a look-up that does not see what was just written"
            }
            Self::Rollback => {
                "a record written outside the caller's transaction; a drop that commits, or that leaves the transaction \
                 open on a pooled connection; a lock or an entry in memory that only the normal path takes back"
            }
            Self::Together => {
                "a claim on a connection of its own beside the caller's transaction, or one that commits by itself \
                 before the effect; a commit in two steps, of which a dropped future leaves one"
            }
            Self::Once => {
                "a look-up before an insert instead of a unique key; a lost race reported as an error that is not \
                 retryable; a lost commit (an empty EXEC, a rollback answered to COMMIT) taken for success"
            }
            Self::Handover => {
                "Duplicate answered for another consumer's uncommitted claim, which loses the message when that one \
                 rolls back; a waiting claim that does not look again when its wait ends; a lock that is never freed"
            }
            Self::Usable => {
                "an insert whose unique violation is caught, where a violation aborts the transaction; a lock timeout \
                 that does the same, without a savepoint"
            }
            Self::SameTransaction => {
                "looking at committed records only; taking the transaction's own lock for another consumer's"
            }
            Self::Groups => {
                "a key without the group; a column that compares without case or trailing space, or that cuts; ids and \
                 groups glued into one text; a lock by a hash that collides"
            }
            Self::Batches => {
                "answers in the database's order instead of the caller's; a statement that meets a repeated id twice; \
                 locks taken in the caller's order; more parameters than a statement takes"
            }
            Self::Purge => {
                "a record whose time is the transaction's start, so that a slow handler's is old at once; a cutoff on \
                 the wrong side; a step, a group or a locked row that is ignored; a group taken for a pattern; `more` \
                 computed wrongly"
            }
            Self::Clock => {
                "the time or the cutoff computed in the consumer's process, whose clock is off by minutes on some host"
            }
            Self::Isolation => {
                "a look-up in a snapshot that is older than the record; a serialization failure that is not reported as \
                 retryable"
            }
            Self::Setup => {
                "create-if-missing that races in the database's catalogue; a setup that drops or fails when there is \
                 something already; a missing or older table reported as Duplicate or as just any error"
            }
            Self::BadInput => {
                "a table name or key prefix pasted into a statement unquoted or unchecked; an error that does not say \
                 which name is wrong"
            }
            Self::Fingerprint => {
                "a fingerprint that only the single path writes or reads; one that a later delivery overwrites"
            }
            Self::DeadLetters => {
                "a letter written beside the caller's transaction; headers kept as a map, a payload taken for text; a later \
                 letter that does not replace the earlier; pages by time alone, which lose letters of one time; a record \
                 that is forgotten again when a message is put back again, or never; a letter removed before it is \
                 published"
            }
        }
    }
}

impl fmt::Display for Law {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}
