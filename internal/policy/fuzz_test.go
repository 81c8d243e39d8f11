package policy_test

import (
	"math/rand/v2"
	"testing"
)

// A tape is a source whose draws are bytes: as many as there are, then random ones. Each
// fills the whole word, so that a change of a byte changes one choice of the driver's.
type tape struct {
	bytes []byte
	rest  rand.Source
}

func (s *tape) Uint64() uint64 {
	if len(s.bytes) == 0 {
		return s.rest.Uint64()
	}
	b := s.bytes[0]
	s.bytes = s.bytes[1:]
	return uint64(b) * 0x0101010101010101
}

// FuzzCore is TestRandom with a log of events that the fuzzer writes.
func FuzzCore(f *testing.F) {
	f.Add([]byte(nil))
	for seed := range uint64(8) { // logs of TestRandom's kind, in whole and cut short
		src := rand.NewPCG(seed, 1)
		log := make([]byte, 200+400*(seed%4))
		for i := range log {
			log[i] = byte(src.Uint64())
		}
		f.Add(log)
	}
	burst := []byte{0, 255, 255, 255, 255, 0, 0, 128} // evictions are on; one endpoint; then offers, samples and progress
	for range 60 {
		burst = append(burst, 255, 10, 40, 200, 255, 255, 255, 90, 70, 0, 255, 140, 255, 128, 255, 1)
	}
	f.Add(burst)
	f.Fuzz(func(t *testing.T, log []byte) {
		if len(log) > 20_000 {
			return
		}
		source := func() rand.Source { return &tape{log, rand.NewPCG(uint64(len(log)), 2)} }
		a := driveFrom(t, source(), nil)
		if !t.Failed() && driveFrom(t, source(), nil) != a {
			t.Error("not deterministic")
		}
	})
}
